"""Checkpoints and models as bytes: whole, or refused in one line; those of before there was a checksum are read."""

import json
import random

import pytest
import safetensors.torch
import torch

from cpbkit.errors import RunError
from cpbkit.training import checkpoint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.ones(4, dtype=torch.bfloat16)}


def test_what_is_saved_is_read_back():
    tensors, about = checkpoint.load(checkpoint.save(TENSORS, {"series": "A"}))
    assert about == {"series": "A"} and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_the_same_model_has_the_same_bytes():
    assert len({checkpoint.save(TENSORS, {"series": "A"}) for _ in range(8)}) == 1


def test_every_flipped_byte_and_every_cut_is_refused():
    content, rng = checkpoint.save(TENSORS, {"series": "A", "scaler": [1.5, 2.5]}), random.Random(0)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= rng.randrange(1, 256)
        try:
            tensors, about = checkpoint.load(bytes(damaged))
        except RunError as error:
            assert "\n" not in str(error)
            continue
        # What JSON spells in two ways says the same: a space for another, as padding.
        assert about == {"series": "A", "scaler": [1.5, 2.5]}, at
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items()), at
    for length in range(0, len(content), 7):
        with pytest.raises(RunError, match="no model or checkpoint"):
            checkpoint.load(content[:length])


def test_a_model_of_before_there_was_a_checksum_is_read():
    old = safetensors.torch.save(TENSORS, {checkpoint.META: json.dumps({"series": "A"})})
    assert checkpoint.load(old)[1] == {"series": "A"}


@pytest.mark.parametrize(
    "about", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "7", "{", '{"a": "' + "x" * (9 << 20) + '"}']
)
def test_a_description_that_is_hostile_is_refused(about):
    with pytest.raises(RunError, match="no model or checkpoint of cpbkit: ") as told:
        checkpoint.load(safetensors.torch.save(TENSORS, {checkpoint.META: about}))
    assert len(str(told.value)) < 200
