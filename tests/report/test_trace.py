"""Plans in torch's own logs and traces, seen from outside: a process each."""

import os
import re
import subprocess
import sys
from pathlib import Path

from expecttest import assert_expected_inline

from report.shown import shown

TESTS = Path(__file__).resolve().parent.parent
CODE = """
import logging
from report.shown import *
from torch_bcg.report.trace import log_plan, trace_plan
(plan,) = called(Untagged(), (torch.ones(3),)).plans
logging.getLogger("torch_bcg.report.trace").info("the plan as it is now")
log_plan(plan)
trace_plan(plan, probed=True)
"""


def run(**variables):
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=TESTS, capture_output=True, text=True, check=True, env={**os.environ, **variables},
    )  # fmt: skip
    return done.stderr


def messages(stderr):
    stderr = stderr.partition("the plan as it is now")[2] or stderr
    found = re.findall(r"torch_bcg/report/trace\.py:\d+\] (.*)", stderr)
    return shown("\n".join(re.sub(r"^\[\S+\] ", "", m) for m in found))


def test_debug_log_has_a_line_a_segment():
    assert_expected_inline(
        messages(run(TORCH_LOGS="+torch_bcg")),
        """\
graph_N on cpu: 2 of 3 kernels recorded, in 2 segments; 1 eager
graph_N: segment 0 graph, 1 kernel
graph_N: segment 1 eager, 1 kernel; host read: shown::untagged, Tensor.tolist (untagged_default, FILE:LINE)
graph_N: segment 2 graph, 1 kernel""",
    )


def test_info_log_has_a_line_a_plan():
    assert_expected_inline(
        messages(run(TORCH_LOGS="torch_bcg")),
        """graph_N on cpu: 2 of 3 kernels recorded, in 2 segments; 1 eager""",
    )


def test_artifacts_reach_the_trace(tmp_path):
    run(TORCH_TRACE=str(tmp_path))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    for name in ("bcg_plan", "bcg_segments", "bcg_reasons"):
        assert f'{{"name": "{name}", "encoding": "string"}}' in text
    assert 'To mark it: torch_bcg.eager_on_graph("shown::untagged")' in text
