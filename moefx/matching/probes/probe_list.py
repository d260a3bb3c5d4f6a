"""All probes, in the order in which a proof runs them.

Cheap probes come first, so that a refusal is early. A probe that depends on others' evidence runs again after them.
"""

from __future__ import annotations

from .branch_outcomes import flip_branches
from .count_functions import vary_count_functions
from .emptiness_decisions import refuse_emptiness_decisions
from .equal_selections import separate_selections
from .expert_counts import vary_expert_counts
from .expert_coverage import show_all_experts
from .float_decisions import mix_decisions
from .idle_experts import concentrate_tokens, leave_experts_idle
from .integer_inputs import vary_integer_inputs
from .joint_choices import combine_choices
from .leaked_sizes import guard_constant_expressions, try_round_sizes, vary_leaked_sizes
from .load_comparisons import vary_loads
from .probe import Probe
from .python_integers import refuse_python_integers
from .repeated_experts import repeat_experts
from .single_expert import refuse_single_expert
from .state_between_calls import vary_state_between_calls
from .token_counts import show_all_slots, vary_token_counts
from .unreached_limits import overflow_limits

_FLIP = Probe(flip_branches, "a branch of Python that took one way in all captures")
_MIX = Probe(mix_decisions, "a comparison of floats with one outcome, which looks like a constant")
_VARY_COUNTS = Probe(vary_count_functions, "a function of counts, positions or joint choices, constant for few tokens")
_OVERFLOW = Probe(overflow_limits, "a capacity that no capture reached, so that nothing seems to be dropped")

# Before captures are compared: each slot and each expert is in some capture.
COVERAGE = (
    Probe(show_all_slots, "slots that a limit drops in all captures"),
    Probe(show_all_experts, "an expert that differs from the others and was never chosen"),
    Probe(refuse_single_expert, "a layer that selects nothing"),
)
# Each probe shows what no capture has shown: other outcomes, values or sizes. Some only add a guard.
INTERVENTIONS = (
    Probe(leave_experts_idle, "a refusal of programs that only ask which experts no id selects"),
    _FLIP,
    _MIX,
    Probe(separate_selections, "a second choice that equals the first one in all captures"),
    Probe(vary_integer_inputs, "ids, lengths or buffers that look like constants"),
    _VARY_COUNTS,
    _OVERFLOW,
    Probe(vary_state_between_calls, "an attribute that a call leaves behind and the next call reads"),
    Probe(repeat_experts, "a token that selects one expert in two slots, whose weights do not add up"),
    Probe(combine_choices, "tests of single choices that no token of a capture passes together"),
    Probe(vary_token_counts, "another form for one token, for a few, or for many"),
    Probe(vary_expert_counts, "another form for an expert with no token, with one or with two"),
    Probe(vary_loads, "a comparison of loads that matters for one expert, or on one side of the sizes"),
    _OVERFLOW.repeat("limits of captures with more tokens, `min(T, 64)`"),
    _FLIP.repeat("branches that only crowds, few tokens or many reach"),
    _MIX.repeat("decisions that only crowds, few tokens or many reach"),
    _VARY_COUNTS.repeat("numbers of the captures since"),
    _OVERFLOW.repeat("limits of the captures since"),
    Probe(vary_leaked_sizes, "a size that became a plain number and decides something at more tokens"),
    Probe(try_round_sizes, "a plain number that distinguishes powers of two, squares or multiples from other sizes"),
    Probe(guard_constant_expressions, "an expression of sizes with one value at the captures' sizes by chance"),
)
# The first two add no captures: they compare what Python did in all captures.
CONFIRMATIONS = (
    Probe(refuse_emptiness_decisions, "Python code that decides by which experts are idle, beyond skipping them"),
    Probe(refuse_python_integers, "an integer that Python counts, whose values no op computes from the routing"),
    Probe(concentrate_tokens, "another form if all tokens choose the same experts, in programs that ask who is idle"),
)
PROBES = (*COVERAGE, *INTERVENTIONS, *CONFIRMATIONS)

__all__ = ["CONFIRMATIONS", "COVERAGE", "INTERVENTIONS", "PROBES"]
