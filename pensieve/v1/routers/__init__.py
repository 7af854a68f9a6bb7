"""Generated from proto/ by scripts/generate_protos; do not edit."""
