"""The contract tests can fail: each mutant of the runtime breaks a scenario that passes without it."""

import pytest
import torch

import torch_bcg
from mutants import on_calls, on_checks, on_memory, on_padding
from mutants.breaks import HOST_MUTANTS, MUTANTS
from mutants.padding_breaks import PADDING_MUTANTS
from torch_bcg.errors import BCGError, BCGWarning
from torch_bcg.graph import modes
from torch_bcg.runtime.device import _POOLS

KILLERS = {
    "never replays": [on_memory.plain],
    "address not in the key": [on_memory.instances, on_memory.replaced_parameter],
    "late addresses not compared": [on_memory.replaced_last_parameter],
    "every first segment runs twice": [on_memory.replaced_last_parameter],
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
    "a handle's module unseen": [on_calls.handle_after_a_replaced_weight],
    "a handle's strides unseen": [on_calls.handle_after_a_transpose],
    "a handle's settings unseen": [on_calls.handle_under_other_settings],
    "a handle's metadata not compared": [on_calls.handle_of_other_numbers],
    "gradients ignored": [on_calls.gradients],
}
HOST_KILLERS = {
    "runs on copies of its operands": [on_memory.plain, on_memory.module],
    "leaves results elsewhere": [on_memory.plain],
    "host reads unseen": [on_calls.untagged_host_read],
    "memory given out twice": [on_checks.two_results],
}
PADDING_KILLERS = {
    "tails not filled": [on_padding.stale_rows, on_padding.declared_slot],
    "tails filled once": [on_padding.declared_slot],
    "tails filled with zero": [on_padding.declared_slot],
    "declared rows unknown": [on_padding.declared_slot],
    "copies never made again": [on_padding.copied_fronts],
    "copies not copied back": [on_padding.copied_fronts],
    "no front is copied": [on_padding.copied_fronts, on_padding.strides],
    "strides of padded values": [on_padding.strides],
    "outputs not cut": [on_padding.whole_call],
    "nothing is cut": [on_padding.whole_call],
    "eager segments see all rows": [on_padding.whole_call],
    "numbers of the bucket": [on_padding.whole_call],
    "smallest bucket": [on_padding.larger_than_a_bucket],
    "guards ignored": [on_padding.guarded],
    "facts not asked": [on_padding.refused_by_facts],
    "trials agree": [on_padding.refused_by_a_trial],
    "trials fill with zero": [on_padding.rows_left_by_a_segment],
    "trials change no rows": [on_padding.rows_that_hide_padding],
    "trials write the caller's memory": [on_padding.buffer_in_a_trial],
    "memory shared too early": [on_checks.lives_that_meet],
    "memory released too early": [
        on_checks.read_twice_under_verify,
        on_checks.read_twice_under_poison,
    ],
    "checks compare nothing": [
        on_checks.wrong_segment,
        on_checks.padded_row_read,
        on_checks.bridge_tail_read,
    ],
    "one size is tried": [on_padding.groups_of_rows],
    "trials compare nothing": [on_padding.refused_by_a_trial],
    "verify does nothing": [on_checks.wrong_segment],
    "poison runs nothing again": [on_checks.padded_row_read, on_checks.bridge_tail_read],
    "poison fills rows with zero": [on_checks.padded_row_read, on_checks.bridge_tail_read],
    "poison leaves dead memory": [on_checks.freed_too_early],
}
# A mutant is killed by what a scenario says, or by an error or warning of the package. Where torch
# itself refuses what the mutant does, its message must be the one below.
REFUSED = {
    "slots made in inference mode": "Inplace update to inference tensor",
    "nothing is cut": "must match the size of tensor",
    "smallest bucket": "exceeds dimension size",
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
    assert list(PADDING_KILLERS) == list(PADDING_MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name, device):
    kill(MUTANTS[name], KILLERS[name], device, REFUSED.get(name))


@pytest.mark.parametrize("name", HOST_MUTANTS)
def test_a_mutant_of_the_host_recorder_is_killed(name):
    kill(HOST_MUTANTS[name], HOST_KILLERS[name], "cpu", REFUSED.get(name))


@pytest.mark.parametrize("name", PADDING_MUTANTS)
def test_a_mutant_of_padding_is_killed(name, device):
    kill(PADDING_MUTANTS[name], PADDING_KILLERS[name], device, REFUSED.get(name))
