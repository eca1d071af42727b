"""What the default run leaves to ``-m slow``: cases that show in more places what others show."""

from __future__ import annotations

import collections

import pytest

# Optimizers that differ from others in their update alone, which is MindSpore's.
RARE = {"RMSProp", "Adagrad", "FTRL", "LazyAdam", "AdaFactor", "AdaMax", "Adadelta", "ASGD"}
RARE |= {"Rprop", "ProximalAdagrad", "AdamOffload"}

# Grouped scales are combined with no algorithm and with THOR.
PAIRS = ("less_bn", "grad_freeze")

# In GRAPH_MODE they compile for seconds what the contract suite, the table of combinations or their
# neighbours compile; PYNATIVE_MODE shows what they are about.
COMPILED_ELSEWHERE = {
    "test_a_loss_scale_is_divided_out_of_the_factors",
    "test_a_rate_set_on_the_users_optimizer_reaches_thor",
    "test_a_resumed_training_goes_on_bit_for_bit",
    "test_a_skipped_step_leaves_curvature_and_weights_bit_identical",
    "test_a_training_is_plain_training_on_growing_images",
    "test_a_window_steps_once_and_a_flush_closes_it",
    "test_an_overflow_leaves_everything_as_it_was",
    "test_frozen_layers_stay_and_their_factors_are_refreshed",
    "test_it_goes_on_from_a_checkpoint",
    "test_it_resumes_bit_for_bit",
    "test_layers_that_rest_keep_their_precision",
    "test_no_more_is_frozen_than_the_share_allows",
    "test_p_sgd_hands_the_gradient_to_thor",
    "test_row_sums_stay_in_a_boosted_model",
    "test_steps_that_overflow_and_micro_batches_are_no_updates",
    "test_the_articles_four_lines",
    "test_the_loss_scale_is_divided_out_once",
    "test_the_trace_rule_refreshes_keeps_and_stops",
    "test_where_upstream_stalls_for_ever_the_default_descends",
    "test_with_freezing_accumulation_and_loss_scaling",
    "test_with_grouped_loss_scales",
    "test_with_mixed_precision",
}

# What they find out is the same for every optimizer.
OPTIMIZERS_ALIKE = {
    "test_a_view_does_what_the_plain_optimizer_does_to_its_parameters",
    "test_after_decay_and_before_moments",
    "test_half_precision_and_scalars",
    "test_state_goes_on_when_asked",
}

# Where every case in GRAPH_MODE is worth its compilation, or reads what is there already.
ALL_IN_GRAPH_MODE = {"test_combinations", "test_distributed", "test_overflow", "test_examples"}
ALL_IN_GRAPH_MODE |= {
    "test_cheaper_operators",
    "test_max_pool",
    "test_thor_distributed",
    "test_dim_reduce_ranks",
    "test_agreement",
}

# Single cases that take seconds; what shows the same stands beside them.
CASES = {
    # three algorithms at once
    "test_table_of_combinations": (
        *("pynative-('thor'", "pynative-('p-bfgs', 'dynamic'"),
        "all three",
        "p-sgd",
        *(f"'{one}', 'grouped'" for one in PAIRS),
    ),
    "test_a_combination_resumes_in_the_middle_of_a_window": ("all three", "graph-('p-bfgs'"),
    # choices inside a graph: test_freezing and test_progressive_resizing
    "test_in_a_graph_around_the_step_the_choices_are_the_same": ("",),
    "test_with_freezing_and_thor": ("graph",),
    # what one Model hands on to the next: those that hold most of it stay
    "test_a_second_model_goes_on_as_the_first_would_have": (
        *("p-sgd", "twa", "label_smoothing", "gradient_centralization", "cheaper_operators"),
        *("compiled_step", "seq_length", "prefix", "p-bfgs"),
    ),
    # make_train_step builds what a Model builds
    "test_it_trains_as_a_model_does": (
        *("dim_reduce", "trace rule", "seq_length", "resizing", "label_smoothing", "prefix"),
        *("adaptive", "gradient_centralization", "cheaper_operators", "less_bn", "thor"),
    ),
    "test_frozen_parameters_stay_and_the_others_train_as_plain": (
        *("pynative-fixed", "graph-fixed", "pynative-dynamic-1"),
    ),
    "test_a_loss_may_hold_a_weight_of_a_layer": ("pynative-O1",),
    "test_fifty_updates_equal_those_of_the_big_batch": (
        *("pynative-SGD-list", "pynative-SGD-schedule", "Momentum-schedule", "Momentum-constant"),
        *("pynative-Adam-list", "Adam-constant", "WeightDecay-list", "WeightDecay-constant"),
    ),
    "test_exit_codes_and_tracebacks_are_those_of_plain_python": (
        *("a message", "raise SystemExit", "missing_module"),
    ),
    "test_managers_and_amp_levels_train": ("pynative-O1", "pynative-O3"),
    "test_it_trains_as_the_step_operator_by_operator": ("[thor]", "progressive"),
    "test_it_goes_on_from_a_checkpoint": ("pynative-3",),
    "test_layers_that_rest_keep_their_precision": ("O2",),
    "test_the_counts_in_mindcv_networks": ("dpn92", "resnext", "seresnet", "wide"),
    # ResNet-18 has the same blocks, or all but the bottleneck, whose rewriting is counted
    "test_level_o1_trains_mindcv_networks": ("resnet50",),
    "test_searches_leave_no_memory_behind": ("",),
    "test_every_loss_scale_gives_the_unscaled_run": ("",),  # that it is divided out once
    "test_a_window_of_equal_batches_is_the_plain_step": ("graph",),
    "test_trials_leave_statistics_and_random_state_alone": ("pynative",),
    "test_group_scales_and_freezing": ("graph",),
    "test_a_step_that_overflows_is_not_counted": ("graph",),
    "test_a_window_is_of_one_size": ("graph",),
    "test_two_models_in_two_threads_do_not_mix": ("graph",),
    "test_the_data_of_one_thread_outlives_a_look_at_the_size_of_anothers": ("graph",),
    # the demo and the comparison of a script run the same
    "test_the_bundled_comparison": ("",),
    "test_weights_are_those_of_a_run_with_the_same_set_by_hand": ("",),
    "test_a_compiled_network_that_is_first_trained_as_a_whole_trains_as_the_other": ("graph",),
    "test_a_network_of_mindcv_trains": ("",),  # LessBN on MindCV's networks
    "test_a_thousand_clean_steps_double": ("",),
    "test_digits_equal_those_of_scikit_learn": ("",),
    "test_subspace_methods_run_and_are_drawn": ("",),
    "test_a_dropped_model_leaves_no_graph_and_its_step_goes_on": ("pynative-thor", "graph-nothing"),
    "test_float16_learns": ("words0",),
    "test_a_long_schedule_takes_no_more_memory": ("function-10000000",),
}


def mark(items):
    """Mark the cases of a run that are slow."""
    compiled = collections.defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        name = item.name[len(item.originalname) :]
        words = CASES.get(item.originalname, ())
        compiles = parameters.get("mode") == "graph"
        elsewhere = compiles and item.originalname in COMPILED_ELSEWHERE
        if elsewhere or any(word in name for word in words) or _is_slow(item, parameters):
            item.add_marker(pytest.mark.slow)
        elif compiles and item.path.stem not in ALL_IN_GRAPH_MODE:
            compiled[item.path, item.originalname].append(item)
    for cases in compiled.values():
        # PYNATIVE_MODE has them all: here compiling takes the time, and one shows that it is right.
        for item in cases[:-1]:
            item.add_marker(pytest.mark.slow)


def _is_slow(item, parameters):
    """Return whether the parameters of a test leave it to ``-m slow``."""
    words = [
        word for one in parameters.values() if isinstance(one, str) for word in one.split(", ")
    ]
    rare = not RARE.isdisjoint(words)
    compiles = parameters.get("mode") == "graph" or "groups" in words
    alike = item.path.stem == "test_loss_scale" or item.originalname in OPTIMIZERS_ALIKE
    return (rare and (compiles or alike)) or parameters.get("ranks") in (3, 8)
