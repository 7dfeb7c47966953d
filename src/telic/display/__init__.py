"""What a person sees while a run goes on: lines, progress, pictures."""
