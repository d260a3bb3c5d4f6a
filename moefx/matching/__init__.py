"""Prove what a block computes: capture it under several routings, and demand one formula.

Read `prove.py` first: its `prove` is the list of the steps. Then the parts, in the order in which a proof uses them:

    first_captures.py     the three captures that a proof begins with
    terms/                a capture's nodes as expressions of inputs and parameters
    lift/                 one capture as its canonical form
    proof/                the state of a proof: evidence, guards, sizes of the next captures
    probes/               what may still be wrong, one file each: more evidence, a guard, or a refusal
    interventions/        forced outcomes, for probes
    results/              the match that a proof ends with, and the slots that it drops
    facts/                questions about nodes that all of them ask
    refusal_causes.py, unsupported_effects.py   why a block is refused

`docs/concepts/proofs.md` follows an example through these steps.
"""
