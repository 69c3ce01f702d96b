"""Which exceptions are the user's to mend; anything else is our bug and keeps its traceback."""

from __future__ import annotations


def user_errors() -> tuple[type[Exception], ...]:
    """Exception types whose message alone is shown."""
    from firesteel.checkpoint.codecs import CodecError
    from firesteel.checkpoint.spec import CheckpointError
    from firesteel.config import ParameterError
    from firesteel.models.deepseek_v4.chat import ChatError
    from firesteel.models.deepseek_v4.config import ConfigError
    from firesteel.ops import BackendError
    from firesteel.speculation.cost import CostError
    from firesteel.speculation.survival import CalibrationError
    from firesteel.tokenizer import TokenizerError

    return (
        CostError,
        CalibrationError,
        CheckpointError,
        CodecError,
        ParameterError,
        ChatError,
        ConfigError,
        BackendError,
        TokenizerError,
        OSError,
    )
