"""What the CUDA and ROCm backends share. Not a backend by itself: it has no `probe`."""
