"""Lift one capture to its canonical form: the same function of each routed row, summed over the slots of a token.

The files, in reading order:

    canonical_form.py     `CanonicalForm`, the result
    lifter.py             `Lifter`: tries sets of expert parameters, and nodes as the routed sum
    parameter_uses.py         which parameters does each row use?
    expert_parameters.py      which of them are the experts'?
    cut_candidates.py         which nodes may be the routed sum?
    cut_lifter.py         `CutLifter`: one node as the routed sum. Its `lift` is the list of the steps:
    expert_owners.py          split each row into summands of experts and the rest
    expert_index.py           find the integer tensor that names the experts of the summands
    value_lookup.py           rank the nodes that may supply a value, such as a routing weight, by their `value_axes.py`
    residual_terms.py         find what each row adds to its experts
    anti_unification.py       unify the summands of one skeleton to one body
    repeated_choices.py       check tokens that select an expert twice
    same_form.py          whether two forms are equal
    distinct_choices.py   whether a token may select one expert twice, by `integer_derivations.py` and `score_masks.py`
    integer_choices.py    whether a program may choose by integers, per token or per sequence
    padded_rows.py        which hidden states a program pads
    lift_refusals.py      why a capture has no form
"""
