"""Graph passes: functions that change a model in place and return whether they did. Targets list them as phases."""
