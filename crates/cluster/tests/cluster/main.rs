//! The messages as bytes, against vectors made apart from this program, and a worker over TCP.

mod support;
mod v1;
mod worker;
