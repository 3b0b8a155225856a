//! Tests of the chart.
