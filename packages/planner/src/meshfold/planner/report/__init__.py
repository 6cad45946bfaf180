"""An estimate as readable text: tables of memory, traffic and time, a picture of the mesh, a schedule's trace."""

from meshfold.planner.report.pipeline import (
    pipeline_numbers,
    pipeline_time_table,
    rank_table,
    schedule_trace,
    stage_table,
)
from meshfold.planner.report.tables import (
    format_seconds,
    memory_table,
    mesh_picture,
    time_table,
    traffic_table,
    verdict_line,
)

__all__ = [
    "format_seconds",
    "memory_table",
    "mesh_picture",
    "pipeline_numbers",
    "pipeline_time_table",
    "rank_table",
    "schedule_trace",
    "stage_table",
    "time_table",
    "traffic_table",
    "verdict_line",
]
