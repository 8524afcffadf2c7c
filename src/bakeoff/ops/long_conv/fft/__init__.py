"""long_conv by FFTs that stay on the chip."""
