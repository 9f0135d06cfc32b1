"""Models and data to train, on the public interface alone."""
