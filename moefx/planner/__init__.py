"""Which parallelisation of a model fits a platform and is fastest, and why (Piper III and IV, X-MoE appendix C).

sheet.py         formulas that are evaluated and shown
architecture.py  what the formulas need to know of a model
catalogue.py     models by name
memory.py        bytes of a GPU
papers.py        the papers' own formulas, as printed
"""
