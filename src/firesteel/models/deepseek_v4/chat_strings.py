"""The strings of DeepSeek-V4's chat protocol: data, byte for byte.

The model was trained to read exactly these bytes, so nothing here may be
reworded, re-wrapped or escaped. Published by DeepSeek with the DeepSeek-V4
weights (MIT License, see NOTICE); compared with vLLM's copy (Apache-2.0).
The bars inside the tokens are U+FF5C and the blocks U+2581.
"""

# ruff: noqa: E501 (long lines are single lines of the protocol)

from __future__ import annotations

from typing import Final

# ---- special tokens ------------------------------------------------------
BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
PAD: Final = "<｜▁pad▁｜>"
SYSTEM: Final = "<｜System｜>"  # never written by the encoder; the drafter's noise id
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
LATEST_REMINDER: Final = "<｜latest_reminder｜>"
THINK: Final = "<think>"
END_THINK: Final = "</think>"
DSML: Final = "｜DSML｜"
IMAGE: Final = "<｜deepseek_image｜>"
FIM_HOLE: Final = "<｜fim▁hole｜>"
FIM_BEGIN: Final = "<｜fim▁begin｜>"
FIM_END: Final = "<｜fim▁end｜>"
TASKS: Final = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

# ---- tool calls and results (ordinary text around the DSML token) ----------
TOOL_CALLS: Final = f"<{DSML}tool_calls>"
END_TOOL_CALLS: Final = f"</{DSML}tool_calls>"
INVOKE: Final = f'<{DSML}invoke name="%s">'
END_INVOKE: Final = f"</{DSML}invoke>"
PARAMETER: Final = f'<{DSML}parameter name="%s" string="%s">'
END_PARAMETER: Final = f"</{DSML}parameter>"
TOOL_RESULT: Final = "<tool_result>"
END_TOOL_RESULT: Final = "</tool_result>"

# ---- texts -----------------------------------------------------------------
EFFORT_TEXTS: Final = {
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n"
        "\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n"
        "\n"
    ),
}

RESPONSE_FORMAT_TEXT: Final = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)

# split where the tool schemas stand, one JSON object per line
TOOLS_HEAD: Final = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL: Final = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
