"""How fast: prefill, decode, training, memory; base and hybrid in one run, beside what the machine could do."""
