"""Why is the GPU idle, and what would each fix gain?"""
