"""What every layer needs: errors, files, hardware, peak memory, progress, FLOPs. No model, no configuration."""
