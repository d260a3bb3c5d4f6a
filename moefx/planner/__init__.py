"""Rank the parallel layouts of a model on a platform, and say why (Piper III and IV, X-MoE appendix C).

`moefx.plan` is in `moefx/ranking.py`. It calls these files, listed from below:
    sheet.py             formulas that are evaluated and shown
    symbols.py           the meaning of their symbols
    architecture.py      the sizes of a model that the formulas take
    catalogue.py         models by name
    describe.py          the sizes of a module
    model_configs.py     the sizes of a transformers config
    layout.py            how ranks share a model and its tokens, and the checkpoint policy
    memory_formulas.py   bytes of a GPU
    compute.py           FLOP and seconds of a forward
    communication.py     bytes and seconds of exchanges
    platforms.py         GPUs and the links between them
    local_platform.py    the platform that a program runs on
    step_formulas.py     seconds of a step
    stage_times.py       seconds of layers, and stages of equal time
    simulation/          a step as events, beside the formulas
    entries.py           layouts that fit, and rejected ones
    search.py            all layouts on a number of ranks
    min_gpus.py          the smallest number of GPUs on which a layout fits
    paper_formulas.py    the papers' own formulas, as printed
    breakdown.py         the parts of memory and time
    regions.py           where layouts fit, SSMB and TED
    scaling.py           the best layout on fewer and on more ranks
    plot_labels.py, plots.py, constants.py, ranking_page.py   the page: pictures, and sources of figures
    mesh_axes.py         the ways to use the axes of a mesh
    decision.py          the decision for moefx.compile, and its reasons
    auto.py              the fastest use of the axes that fits
"""
