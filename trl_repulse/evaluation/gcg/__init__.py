"""Attacks by greedy coordinate gradient (GCG), and how often they succeed. Names are imported when first used."""

from typing import TYPE_CHECKING

from ..._lazy import lazy_names


_EXPORTS = {
    **dict.fromkeys(("GCGConfig", "GCGEvaluationConfig", "GCGRunArguments"), "config"),
    **dict.fromkeys(("GCG", "GCGError", "GCGResult", "run_gcg"), "engine"),
    **dict.fromkeys(("RefusalJudge", "evaluate_gcg"), "evaluator"),
    **dict.fromkeys(("format_report", "read_results", "summarize"), "results"),
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from .config import GCGConfig, GCGEvaluationConfig, GCGRunArguments  # noqa: F401
    from .engine import GCG, GCGError, GCGResult, run_gcg  # noqa: F401
    from .evaluator import RefusalJudge, evaluate_gcg  # noqa: F401
    from .results import format_report, read_results, summarize  # noqa: F401

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
