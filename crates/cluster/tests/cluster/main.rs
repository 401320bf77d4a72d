//! The messages as bytes, against vectors made apart from this program, and workers and a
//! coordinator over TCP.

mod coordinator;
mod registry;
mod session;
mod support;
mod v1;
mod v2;
mod worker;
