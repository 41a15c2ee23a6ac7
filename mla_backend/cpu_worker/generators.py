# SPDX-License-Identifier: Apache-2.0
"""A request with a seed under chunked prefill.

The chunks of a prompt before its last one sample a token that is thrown away. vLLM then takes the
request's random generator back by an offset; torch's CPU generators have none, and the engine dies.
"""

import functools
from typing import Any


def keep_generators(runner: Any) -> None:
    """Make the thrown-away draws of vLLM's CPU model `runner` leave no trace in its generators.

    What a request with a seed answers then does not depend on how its prompt was cut.
    """
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    def thrown_away() -> list[int]:
        generators = runner.input_batch.generators
        return [row for row in generators if runner.discard_request_mask.np[row]]

    @functools.wraps(sample)
    def sample_and_restore(*args: Any, **kwargs: Any) -> Any:
        kept = [runner.input_batch.generators[row] for row in thrown_away()]
        states = [generator.get_state() for generator in kept]
        output = sample(*args, **kwargs)
        for generator, state in zip(kept, states, strict=True):
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def bookkeeping_without_them(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        everyone, hidden = batch.generators, thrown_away()
        batch.generators = {row: g for row, g in everyone.items() if row not in hidden}
        try:
            return bookkeeping(*args, **kwargs)
        finally:
            batch.generators = everyone

    runner._sample, runner._bookkeeping_sync = sample_and_restore, bookkeeping_without_them
