//! Route traces: any bytes give a trace or an error; a trace is written, read back and counted.

#![no_main]

use std::path::Path;

use container::config::{MAX_ROUTED_EXPERTS, MAX_TOP_K};
use experts::{Pairs, RouteShape, Trace, TraceWriter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("trace");
    let trace = match Trace::parse(path, data, RouteShape::ANY) {
        Err(error) => return assert!(!error.to_string().is_empty()),
        Ok(trace) => trace,
    };
    assert!(trace.top_k() <= MAX_TOP_K);
    assert!(trace.layers() * trace.experts() <= MAX_ROUTED_EXPERTS);
    let mut text = Vec::new();
    let mut writer = TraceWriter::new(&mut text);
    for (call, row) in trace.calls().flat_map(|call| call.rows().map(move |row| (call, row))) {
        let routes = row.experts.iter().copied().zip(row.gates.iter().copied());
        writer.row(call.number(), row.row, call.layer(), routes).unwrap();
    }
    let again = Trace::parse(path, &text[..], RouteShape::ANY).unwrap();
    assert_eq!(again.rows(), trace.rows());
    for (a, b) in trace.calls().zip(again.calls()) {
        assert_eq!((a.number(), a.layer()), (b.number(), b.layer()));
        assert!(a.rows().zip(b.rows()).all(|(a, b)| a.row == b.row && a.experts == b.experts));
    }
    let pairs = Pairs::of(&trace);
    let read = Pairs::parse(Path::new("pairs"), pairs.to_text().as_bytes(), RouteShape::ANY);
    assert_eq!(read.unwrap(), pairs);
    let recall = pairs.recall(&trace, 1, trace.top_k());
    assert!(recall.hits <= recall.selections);
});
