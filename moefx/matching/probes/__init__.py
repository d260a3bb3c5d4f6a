"""The probes: each shows what no capture of a proof has shown, and adds evidence or a guard, or refuses the block.

`probe_list.py` has all of them in order, with the kind of wrong rewrite that each prevents. `probe.py` defines a probe,
`proof.proof_view` the steps that it may take. A file holds the probes for one kind of program, shown at its top, except
`boundary_values.py`, which finds integers for the arguments of all captures.
"""
