//! Tests on a real one-node cluster, with the image and the chart that users get.
