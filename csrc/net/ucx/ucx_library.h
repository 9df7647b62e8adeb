#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "net/ucx/ucx_address.h"

namespace nvx::net {

/// libucp, loaded at run time: what nvx was compiled against need not be there, and another version may be. Structures
/// grow at their ends between versions and say by masks what they hold, so either may be the newer one.
struct UcxLibrary {
  UcxVersion version;
  std::string path;

  decltype(&ucp_get_version) get_version;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_context_query) context_query;
  decltype(&ucp_context_print_info) context_print_info;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_query) worker_query;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_worker_get_efd) worker_get_efd;
  decltype(&ucp_worker_arm) worker_arm;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_ep_close_nbx) ep_close_nbx;
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx;
  decltype(&ucp_am_send_nbx) am_send_nbx;
  decltype(&ucp_am_recv_data_nbx) am_recv_data_nbx;
  decltype(&ucp_request_check_status) request_check_status;
  decltype(&ucp_request_free) request_free;
  decltype(&ucs_status_string) status_string;

  /// What a failed send or a broken endpoint means.
  std::string explain(ucs_status_t status) const;
};

/// Loads it when first called; never unloaded. Throws Error with what to install.
const UcxLibrary& ucx_library();

/// Says so, once, if there is another libucp in this process than nvx's own.
void warn_of_second_ucx(const UcxLibrary& own);

}  // namespace nvx::net
