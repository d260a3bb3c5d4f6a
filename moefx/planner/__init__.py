"""Which parallelisation of a model fits a platform and is fastest, and why (Piper III and IV, X-MoE appendix C).

The files, from below:
    sheet.py           formulas that are evaluated and shown
    symbols.py         what their symbols mean
    architecture.py    what the formulas need to know of a model
    catalogue.py       models by name
    describe.py        the same of a module
    configs.py         the same of a transformers config
    layout.py          how ranks share a model and its tokens, and what is kept for the backward
    memory.py          bytes of a GPU
    compute.py         FLOP and seconds of a forward
    communication.py   bytes and seconds of exchanges
    platforms.py       GPUs and the links between them
    here.py            the platform that a program runs on
    step.py            seconds of a step
    simulation/        a step as events, beside the formulas
    ranking.py         layouts that fit and others, as tables, formulas and a page
    search.py          all layouts, ranked
    fewest.py          how many ranks it takes where nothing fits
    axes.py            the ways to use the axes of a mesh
    decision.py        what was decided for moefx.compile, and why
    auto.py            the fastest use of the axes that fits
    papers.py          the papers' own formulas, as printed
    parts.py           what memory and time are made of
    regions.py         what fits, SSMB and TED
    scaling.py         the best on fewer and on more ranks
    labels.py, plots.py, figures.py, page.py    the page: pictures, sources of figures, all of it
"""
