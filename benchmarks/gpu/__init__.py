"""Parts of `benchmarks/gpu_checks.sh`, each a process of its own that writes one JSON file."""
