"""What `nvx gpucheck` is made of. The command itself is nvx.commands.gpucheck; nothing here needs nvx's own module."""
