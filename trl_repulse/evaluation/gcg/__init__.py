"""Attacks by greedy coordinate gradient (GCG), and how often they succeed. Names are imported when first used."""

from typing import TYPE_CHECKING

from ..._lazy import lazy_names


_EXPORTS = {
    "GCG": "engine",
    "GCGConfig": "config",
    "GCGError": "engine",
    "GCGEvaluationConfig": "config",
    "GCGResult": "engine",
    "GCGRunArguments": "config",
    "RefusalJudge": "evaluator",
    "evaluate_gcg": "evaluator",
    "format_report": "results",
    "read_results": "results",
    "run_gcg": "engine",
    "summarize": "results",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from .config import GCGConfig, GCGEvaluationConfig, GCGRunArguments  # noqa: F401
    from .engine import GCG, GCGError, GCGResult, run_gcg  # noqa: F401
    from .evaluator import RefusalJudge, evaluate_gcg  # noqa: F401
    from .results import format_report, read_results, summarize  # noqa: F401

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
