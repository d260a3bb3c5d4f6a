"""Terms: what each element of a captured tensor is, as an expression of inputs and parameters.

Equal rows must be equal objects, whatever code computes them. So terms are made by one class, `Terms`, which keeps them
in a normal form. It simplifies a term when it makes it, and answers two questions on demand:

    term.py               the expression `Term`, its ops, and how it prints
    normal_form.py        `Terms`: the table of all terms, and a constructor for each op
    constant_folding.py   pointwise ops on known numbers
    einsum_terms.py       the constructor of contractions, the longest one
    element_selection.py  which term is element i of an axis? `Terms.pick` remembers the answers
    sum_expansion.py      which summands has a sum over experts? `Terms.resolve` remembers the answers
    index_arithmetic.py   shapes and indices, without terms
    parameter_slices.py   slices of parameters, the leaves that tell experts apart

Read `term.py` and `normal_form.py` first. Captured graphs become terms in these files:

    node_semantics.py     `Semantics`: the term of a node
    op_rules/             a short function for each ATen op
"""
