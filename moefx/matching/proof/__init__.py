"""The state of a proof, in four objects.

The files, in reading order:

    proof_state.py        `ProofState`: makes captures, and passes all else on
    evidence.py           `Evidence`: the forms of all captures, which agree
    evidence_aligner.py   `EvidenceAligner`: lifts captures alike, so that their forms can be compared
    size_choice.py        `SizeChoice`: the sizes of the next capture
    proof_view.py         `ProofView`: the part of a proof that probes see, on one screen
"""
