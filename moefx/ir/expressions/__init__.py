"""The computation of an expert, as data that ops take as an argument.

pointwise_expression.py   the pointwise parts between the GEMMs
pointwise_derivative.py   the derivatives of these, by torch's autograd
expert_body.py            `ExpertBody`: GEMMs and pointwise parts of one expert
expression_check.py       checks expressions from outside before they become code
"""
