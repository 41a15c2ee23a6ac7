# SPDX-License-Identifier: Apache-2.0
"""A fault in the steps of an engine, for MLA_BACKEND_CHECK to find."""


def spoil_steps(seq_len):
    """From now on the new tokens of a request that is `seq_len` long get the slots after theirs."""
    from mla_backend.attention.step_check import StepCheck

    check = StepCheck.__call__

    def check_spoilt(self, common):
        starts = common.query_start_loc.tolist()
        for row, length in enumerate(common.seq_lens.tolist()[: len(starts) - 1]):
            if length == seq_len:
                common.slot_mapping[starts[row] : starts[row + 1]] += 1
        check(self, common)

    StepCheck.__call__ = check_spoilt
