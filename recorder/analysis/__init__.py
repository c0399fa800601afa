"""Whole-run aggregates: one pass over the part files, in counts that add up. See docs/analysis.md. Loads no torch."""

from recorder.analysis.analyse import Analysis, analyse, stored_analysis

__all__ = ["Analysis", "analyse", "stored_analysis"]
