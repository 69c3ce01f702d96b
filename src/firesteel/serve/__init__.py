"""``firesteel serve``: an OpenAI-compatible server in front of the engine.

    client -> app (routes) -> protocol (what is asked) -> client (messages) -> worker (the engine's process)
    client <- answers (choices, chunks) <- parsing (reasoning, tool calls) <- pieces of text

Only ``worker`` imports the engine; everything else runs without torch.
"""
