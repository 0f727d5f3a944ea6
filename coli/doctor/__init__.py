"""`coli doctor`: is the model whole, does it fit, and can this machine run it?

    finding.py     Finding, the Patient that checks look at, the Report
    examine.py     the table of checks, and the loop that no check can break
    model.py       what is asked of a model: config, tensors, text, experts, memory
    files.py       every header by itself, and all of them together
    checksums.py   what a download says its files' checksums are, and whether they are
    machine.py     what is asked of the machine: memory, disks, cache, CPU, limits
    software.py    Numba, the Vulkan loader, versions

Nothing here writes into a model's folder.
"""
