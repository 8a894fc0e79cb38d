"""Turns a timeline into findings: which rank, of what, how sure, at what cost, whose fault."""

from detect.detector import detect
from detect.findings.text import render_text
from detect.optable import detect_op_table
from detect.report import Cause, Finding, Owner, Report, Verdict
from detect.settings import DetectorSettings

__megascan__ = True

__all__ = [
    "Cause",
    "DetectorSettings",
    "Finding",
    "Owner",
    "Report",
    "Verdict",
    "detect",
    "detect_op_table",
    "render_text",
]
