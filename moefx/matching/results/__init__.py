"""The result of a proof: a match, and the rule by which it drops slots.

match_result.py       `Match`: the forms that agree, the guards, the groups of experts
drop_rules.py         the rule that explains which slots are dropped, such as a capacity
drop_masks.py         a mask of the program that explains them instead
capacity_formulas.py  a capacity as a formula of the sizes
size_samples.py       captures at more sizes, which tell formulas apart
"""
