"""The console command `trl-repulse`."""
