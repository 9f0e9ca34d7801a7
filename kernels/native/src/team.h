// How threads share a loop. All of it is a thread's own within a part of a step that it computes alone (layers.cpp).

#pragma once

#include <omp.h>

#include <cstdint>

namespace legato {

inline int64_t team_size() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// `body(i)` for all of [0, count); who has finished takes `at_once` more.
template <class Body>
void share(int64_t count, int64_t at_once, const Body& body) {
  if (team_size() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, at_once)
  for (int64_t i = 0; i < count; ++i) body(i);
}

// As many for each, where that `is_worth` calling the others.
template <class Body>
void share_evenly(int64_t count, bool is_worth, const Body& body) {
  if (!is_worth || team_size() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace legato
