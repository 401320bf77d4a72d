//! One file per command.

pub mod bench;
pub mod bench_cluster;
pub mod chat;
pub mod cluster;
pub mod convert;
pub mod doctor;
pub mod info;
pub mod mirror;
pub mod oracle;
pub mod plan;
pub mod route;
pub mod run;
pub mod score;
pub mod synth;
pub mod tune;
