// The route of a collective's tensors, as a table.

#include "group/plan/route.h"

#include <gtest/gtest.h>

#include <string>

namespace nvx::test {
namespace {

enum class Is : uint8_t { kNo, kYes, kAny };

struct ExpectedRoute {
  Is on_device, delegate_serves, kernels_serve, is_large, delegate_named, proxies_serve;
  Route route;
};

constexpr Is no = Is::kNo, yes = Is::kYes, any = Is::kAny;

// clang-format off
constexpr ExpectedRoute kRoutes[] = {
    // on device  delegate  kernels  large  delegate  proxies
    //            serves    serve           named     serve
    {  no,        any,      any,     any,   any,      any,   Route::kMemory},
    {  yes,       yes,      any,     any,   any,      any,   Route::kDelegate},
    {  yes,       no,       yes,     any,   any,      any,   Route::kKernels},
    {  yes,       no,       no,      no,    any,      no,    Route::kStaged},
    {  yes,       no,       no,      no,    yes,      any,   Route::kStaged},
    {  yes,       no,       no,      yes,   any,      no,    Route::kChunks},
    {  yes,       no,       no,      yes,   yes,      any,   Route::kChunks},
    {  yes,       no,       no,      any,   no,       yes,   Route::kHostProxy},
};
// clang-format on

const char* name_of(Route route) {
  switch (route) {
    case Route::kMemory: return "memory";
    case Route::kStaged: return "staged";
    case Route::kChunks: return "chunks";
    case Route::kHostProxy: return "proxy";
    case Route::kKernels: return "kernels";
    case Route::kDelegate: return "delegate";
  }
  return "none";
}

constexpr unsigned kFacts = 6;

RouteFacts facts_of(unsigned bits) {
  const auto bit = [&](unsigned k) { return (bits >> k & 1) != 0; };
  return {bit(0), bit(1), bit(2), bit(3), bit(4), bit(5)};
}

bool is(Is wanted, bool fact) { return wanted == Is::kAny || fact == (wanted == Is::kYes); }

bool applies(const ExpectedRoute& row, const RouteFacts& f) {
  return is(row.on_device, f.on_device) && is(row.delegate_serves, f.delegate_serves) &&
         is(row.kernels_serve, f.kernels_serve) && is(row.is_large, f.is_large) &&
         is(row.delegate_named, f.delegate_named) && is(row.proxies_serve, f.proxies_serve);
}

std::string described(const RouteFacts& f) {
  std::string all;
  const auto add = [&](bool fact, const char* what) { all += fact ? std::string(all.empty() ? "" : ", ") + what : ""; };
  add(f.on_device, "on a device"), add(f.delegate_serves, "a delegate serves"), add(f.kernels_serve, "kernels serve");
  add(f.is_large, "large"), add(f.delegate_named, "a delegate is named"), add(f.proxies_serve, "proxies serve");
  return all.empty() ? "nothing" : all;
}

TEST(Route, IsTheExpectedTable) {
  for (unsigned bits = 0; bits < 1u << kFacts; ++bits) {
    const RouteFacts facts = facts_of(bits);
    size_t rows = 0;
    for (const ExpectedRoute& row : kRoutes) {
      if (!applies(row, facts)) continue;
      ++rows;
      EXPECT_STREQ(name_of(route_of(facts)), name_of(row.route)) << described(facts);
    }
    EXPECT_GE(rows, 1u) << "no row for: " << described(facts);
  }
}

/// The ranks agree on proxies, in a collective call, exactly if the answer changes the route.
TEST(Route, ProxiesAreQueriedOnlyIfTheAnswerMatters) {
  for (unsigned bits = 0; bits < 1u << kFacts; ++bits) {
    RouteFacts without = facts_of(bits), with = without;
    without.proxies_serve = false, with.proxies_serve = true;
    EXPECT_EQ(may_be_proxied(without), route_of(without) != route_of(with)) << described(without);
  }
}

TEST(Route, DecidesWhichMemoryAnOperationGets) {
  struct Row {
    Route route;
    bool uses_tensors, goes_in_parts;
  };
  constexpr Row kRows[] = {
      {Route::kMemory, true, false},   {Route::kStaged, false, false}, {Route::kChunks, true, true},
      {Route::kHostProxy, true, true}, {Route::kKernels, true, false}, {Route::kDelegate, true, false},
  };
  for (const Row& row : kRows) {
    EXPECT_EQ(uses_tensors(row.route), row.uses_tensors) << name_of(row.route);
    EXPECT_EQ(goes_in_parts(row.route), row.goes_in_parts) << name_of(row.route);
  }
}

}  // namespace
}  // namespace nvx::test
