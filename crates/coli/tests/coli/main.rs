//! The program as a user runs it.

mod bench;
mod cluster;
mod commands;
mod convert;
mod gate;
mod hostile;
mod memory;
mod mirror;
mod route;
mod support;
mod tune;
