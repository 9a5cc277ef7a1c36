"""The contract tests can fail: each mutant of the runtime breaks a scenario that passes without it."""

import pytest
import torch

import torch_bcg
from mutants import on_calls, on_memory
from mutants.breaks import HOST_MUTANTS, MUTANTS
from torch_bcg.errors import BCGError, BCGWarning
from torch_bcg.graph import modes
from torch_bcg.runtime.device import _POOLS

KILLERS = {
    "never replays": [on_memory.plain],
    "address not in the key": [on_memory.instances, on_memory.replaced_parameter],
    "moved tensors unseen": [on_memory.replaced_parameter],
    "dead programs kept": [on_memory.dead_module],
    "programs not freed": [on_memory.reset],
    "inputs not copied in": [on_memory.plain],
    "inputs copied in once": [on_memory.plain],
    "writes not copied back": [on_memory.written_input, on_memory.ambient_read],
    "writes copied back once": [on_memory.written_input],
    "writes copied back at the end": [on_memory.ambient_read, on_memory.exception_after_a_write],
    "overlap unseen": [on_memory.overlapping_views],
    "eager calls silent": [on_memory.warned_once],
    "outputs in program memory": [on_memory.plain],
    "outputs cloned apart": [on_memory.outputs_that_share],
    "outputs cloned once": [on_memory.plain],
    "views of slots returned": [on_memory.view_of_an_input],
    "arguments remade once": [on_memory.view_of_an_input],
    "eager values lost": [on_memory.eager_values],
    "eager segments run once": [on_memory.plain, on_memory.eager_values],
    "bridges keep the first value": [on_memory.plain],
    "views taken for reads": [on_memory.passed_by_reference],
    "cells not cleared": [on_memory.passed_by_reference],
    "numbers filled once": [on_calls.changing_number],
    "sizes not in the key": [on_calls.size_from_a_number],
    "modes left behind": [on_calls.exception_inside_autocast],
    "modes not put in force": [on_calls.autocast],
    "slots made in inference mode": [on_calls.no_grad_and_inference_mode],
    "one seed": [on_calls.dropout],
    "recorded segments replayed once": [on_memory.plain],
    "recording executes": [on_memory.module],
    "probed twice": [on_calls.side_effects],
    "re-entry unseen": [on_calls.re_entry],
    "in use after an exception": [on_memory.exception_after_a_write],
    "later marks unseen": [on_calls.later_mark],
    "gradients ignored": [on_calls.gradients],
}
HOST_KILLERS = {
    "runs on copies of its operands": [on_memory.plain, on_memory.module],
    "leaves results elsewhere": [on_memory.plain],
    "host reads unseen": [on_calls.untagged_host_read],
}
# A mutant is killed by what a scenario says, or by an error or warning of the package. Where torch
# itself refuses what the mutant does, its message must be the one below.
REFUSED = {
    "slots made in inference mode": "Inplace update to inference tensor",
}


def clean():
    for pool in _POOLS.values():
        pool.busy = False  # a mutant may have left it otherwise
    torch._dynamo.reset()
    torch_bcg.reset()
    torch.manual_seed(0)


def kill(mutate, scenarios, device, refused):
    for scenario in scenarios:
        clean()
        scenario(device)
        clean()
        with modes.preserved(), pytest.MonkeyPatch.context() as monkeypatch:
            mutate(monkeypatch)
            try:
                scenario(device)
            except (AssertionError, pytest.fail.Exception, BCGError, BCGWarning):
                continue
            except RuntimeError as error:
                if refused is None or refused not in str(error):
                    raise
                continue
            finally:
                clean()
        pytest.fail(f"{scenario.__name__} passes with this mutant")


def test_each_mutant_has_a_killer():
    assert list(KILLERS) == list(MUTANTS)
    assert list(HOST_KILLERS) == list(HOST_MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name, device):
    kill(MUTANTS[name], KILLERS[name], device, REFUSED.get(name))


@pytest.mark.parametrize("name", HOST_MUTANTS)
def test_a_mutant_of_the_host_recorder_is_killed(name):
    kill(HOST_MUTANTS[name], HOST_KILLERS[name], "cpu", REFUSED.get(name))
