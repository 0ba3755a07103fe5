"""Attacks by greedy coordinate gradient (GCG), and how often they succeed.

Each name is imported when it is first used, so that reading results needs no model and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


_EXPORTS = {
    "GCG": "engine",
    "GCGConfig": "config",
    "GCGError": "scoring",
    "GCGEvaluationConfig": "config",
    "GCGResult": "engine",
    "GCGRunArguments": "config",
    "RefusalJudge": "judges",
    "RewardJudge": "judges",
    "evaluate_gcg": "evaluator",
    "format_report": "report",
    "merge_results": "records",
    "read_results": "records",
    "run_gcg": "engine",
    "summarize": "report",
}

__all__ = [
    "GCG",
    "GCGConfig",
    "GCGError",
    "GCGEvaluationConfig",
    "GCGResult",
    "GCGRunArguments",
    "RefusalJudge",
    "RewardJudge",
    "evaluate_gcg",
    "format_report",
    "merge_results",
    "read_results",
    "run_gcg",
    "summarize",
]

if TYPE_CHECKING:
    from .config import GCGConfig, GCGEvaluationConfig, GCGRunArguments
    from .engine import GCG, GCGResult, run_gcg
    from .evaluator import evaluate_gcg
    from .judges import RefusalJudge, RewardJudge
    from .records import merge_results, read_results
    from .report import format_report, summarize
    from .scoring import GCGError


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
