"""What is done to recorders and recordings to break them."""

import dataclasses

import torch
from torch import Tensor

from torch_bcg.runtime import memory
from torch_bcg.runtime.recorders import CudaRecorder, HostRecorder, Recording


def recorders(change):
    """The mutant in which both recorders return ``change(recording)``."""

    def mutate(monkeypatch):
        for recorder in (HostRecorder, CudaRecorder):
            monkeypatch.setattr(recorder, "record", changed(recorder.record, change))

    return mutate


def changed(record, change):
    return lambda recorder, *args: change(record(recorder, *args))


def executed(recording):
    """Recording runs the segment, as a warm-up would."""
    recording.replay()
    return recording


def one_seed(recording):
    def replay():
        torch.manual_seed(0)
        recording.replay()

    return Recording(replay, recording.outputs, recording)


def one_replay(recording):
    done = []

    def replay():
        if not done:
            done.append(recording.replay())

    return Recording(replay, recording.outputs, recording)


def fresh_operands(original):
    """Runs the segment again, on copies of what it was given instead of at their addresses."""

    def record(recorder, code, operands, allocate):
        copies = [x.clone() if isinstance(x, Tensor) else x for x in operands]
        recording = original(recorder, code, copies, allocate)
        return Recording(recording.replay, recording.outputs, copies)

    return record


def fresh_outputs(original):
    """Runs the segment again, and leaves its results where nobody looks."""

    def record(recorder, code, operands, allocate):
        recording = original(recorder, code, operands, allocate)
        return Recording(recording.replay, tuple(o.clone() for o in recording.outputs))

    return record


def one_too_much(recording):
    """Replays something else than what was recorded."""
    places = [memory.unowned(t) for t in recording.outputs]

    def replay():
        recording.replay()
        for t in places:
            t.add_(1)

    return dataclasses.replace(recording, replay=replay)
