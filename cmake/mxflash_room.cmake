# A room is one folder of src/ and one static library: mxflash_<name>. USES is public, so that the order of the calls in
# CMakeLists.txt is the order of the dependencies.
add_library(mxflash_options INTERFACE)
target_include_directories(mxflash_options INTERFACE ${PROJECT_SOURCE_DIR}/include)
set(
  warnings
  -Wall
  -Wextra
  -Wpedantic
  -Wshadow
  -Wconversion
  -Wsign-conversion
  -Wnon-virtual-dtor
  -Wold-style-cast
)
# A fused multiply-add rounds once where the contract rounds twice: the codes would depend on the compiler.
set(rounding -ffp-contract=off)
target_compile_options(
  mxflash_options
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${warnings};${rounding};$<$<BOOL:${MXFLASH_WARNINGS_AS_ERRORS}>:-Werror>>
)
if(MXFLASH_CUDA)
  # nvcc's own code for the host has casts and line markers that these would report.
  list(REMOVE_ITEM warnings -Wpedantic -Wold-style-cast)
  list(JOIN warnings "," warnings)
  target_compile_options(
    mxflash_options
    INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${warnings},${rounding};--expt-relaxed-constexpr>
      $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${MXFLASH_WARNINGS_AS_ERRORS}>>:-Werror=all-warnings;-Xcompiler=-Werror>
  )
endif()
if(MXFLASH_SANITIZE)
  # Not a generator expression: the list of sanitizers has commas.
  target_compile_options(
    mxflash_options
    INTERFACE -fsanitize=${MXFLASH_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer
  )
  target_link_options(mxflash_options INTERFACE -fsanitize=${MXFLASH_SANITIZE})
endif()
if(MXFLASH_COVERAGE)
  target_compile_options(mxflash_options INTERFACE --coverage -fprofile-update=atomic)
  target_link_options(mxflash_options INTERFACE --coverage)
endif()

function(mxflash_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;USES" ${ARGN})
  set(target mxflash_${name})
  if(ROOM_SOURCES)
    list(TRANSFORM ROOM_SOURCES PREPEND src/${name}/)
    add_library(${target} STATIC ${ROOM_SOURCES})
    target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${target} PUBLIC mxflash_options ${ROOM_USES})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  else()
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE mxflash_options ${ROOM_USES})
  endif()
endfunction()
