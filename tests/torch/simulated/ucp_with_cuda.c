/* Stands for a libucp.so.0 with CUDA and RDMA: the real one, which has neither here, behind four of its functions.
 * Memory that nvx reason is a device's goes to the real one as host memory, which it is on the simulated device. */

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <ucp/api/ucp.h>

static void* real(const char* name) {
  static void* library;
  if (!library) library = dlopen(REAL_UCP, RTLD_NOW | RTLD_LOCAL);
  return dlsym(library, name);
}

/* For the test: bytes of device memory that were sent and received, and sends that UCX might have copied to its own
 * buffers. */
static atomic_size_t sent, received, eager;
size_t fake_ucp_sent(void) { return atomic_exchange(&sent, 0); }
size_t fake_ucp_received(void) { return atomic_exchange(&received, 0); }
size_t fake_ucp_eager(void) { return atomic_exchange(&eager, 0); }

ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
  ucs_status_t (*query)(ucp_context_h, ucp_context_attr_t*) = real("ucp_context_query");
  ucs_status_t status = query(context, attributes);
  attributes->memory_types |= 1ull << UCS_MEMORY_TYPE_CUDA;
  return status;
}

void ucp_context_print_info(const ucp_context_h context, FILE* stream) {
  void (*print)(const ucp_context_h, FILE*) = real("ucp_context_print_info");
  print(context, stream);
  fprintf(stream, "#      resource 99 :  md 99 dev 99 flags -- rc_verbs/fake0:1\n");
}

/* The parameters for the real one. */
static ucp_request_param_t on_host(const ucp_request_param_t* given, atomic_size_t* counter, size_t bytes) {
  ucp_request_param_t param = *given;
  if (param.memory_type == UCS_MEMORY_TYPE_CUDA) atomic_fetch_add(counter, bytes);
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes,
                                 const void* body, size_t bytes, const ucp_request_param_t* given) {
  ucs_status_ptr_t (*send)(ucp_ep_h, unsigned, const void*, size_t, const void*, size_t, const ucp_request_param_t*) =
      real("ucp_am_send_nbx");
  if (given->memory_type == UCS_MEMORY_TYPE_CUDA && !(given->flags & UCP_AM_SEND_FLAG_RNDV)) atomic_fetch_add(&eager, 1);
  ucp_request_param_t param = on_host(given, &sent, bytes);
  return send(endpoint, id, header, header_bytes, body, bytes, &param);
}

ucs_status_ptr_t ucp_am_recv_data_nbx(ucp_worker_h worker, void* descriptor, void* to, size_t bytes,
                                      const ucp_request_param_t* given) {
  ucs_status_ptr_t (*receive)(ucp_worker_h, void*, void*, size_t, const ucp_request_param_t*) =
      real("ucp_am_recv_data_nbx");
  ucp_request_param_t param = on_host(given, &received, bytes);
  return receive(worker, descriptor, to, bytes, &param);
}
