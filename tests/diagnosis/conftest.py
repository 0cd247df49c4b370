"""Collects the findings' tests only where HALFSTEP_DIAGNOSIS is set."""

import os

collect_ignore = [] if os.environ.get("HALFSTEP_DIAGNOSIS") else ["test_findings.py"]
