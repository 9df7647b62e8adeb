"""The tests of CPU tensors, run on tensors of an accelerator.

They cover each type with each operator, lists of all sizes, empty, aliased and strided tensors, and torch's checks of
every call.
"""

import test_detail
import test_move
import test_reduce
import test_tensors
from on_device import ask_all
from ranks import on_fake_gpus

MOVES = (
    test_move.test_every_dtype,
    test_move.test_all_gather_of_uneven_lists,
    test_move.test_gather_and_scatter_of_uneven_lists,
    test_move.test_all_to_all_single_with_splits,
    test_move.test_all_to_all_of_any_lists,
    test_move.test_lists_of_any_shapes,
)
REDUCTIONS = (
    test_reduce.test_every_dtype_and_op,
    test_reduce.test_any_bits,
    test_reduce.test_premul_sum_takes_any_factor,
    test_reduce.test_complex_halves,
    test_reduce.test_reduce_scatter_of_uneven_lists,
)
SHAPES = (
    test_tensors.test_empty_tensors_in_every_collective,
    test_tensors.test_gathers_in_place,
    test_tensors.test_scatters_in_place,
    test_tensors.test_all_to_all_in_place,
    test_tensors.test_the_same_input_sent_to_everybody,
    test_tensors.test_channels_last,
    test_tensors.test_expanded_tensors,
    test_tensors.test_zero_dimensional_tensors,
)
CHECKED = (test_detail.test_reductions, test_detail.test_moves)
ALL = (*MOVES, *REDUCTIONS, *SHAPES, *CHECKED)

globals().update(ask_all(ALL, __name__, on_fake_gpus))
