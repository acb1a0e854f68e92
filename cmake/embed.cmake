# mxflash_embed(<target> <symbol> <file>) puts <file> into <target>, which then has
#   #include "embedded/<symbol>.hpp"    ->    std::string_view mxflash::embedded::<symbol>();
# The assembler reads the bytes (.incbin): an array literal of several megabytes would take the compiler minutes.
function(mxflash_embed target symbol file)
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "mxflash_embed(${symbol}): no file '${file}'; run scripts/setup.sh, which installs it")
  endif()
  set(name ${symbol})
  set(path "${file}")
  set(dir ${CMAKE_CURRENT_BINARY_DIR}/mxflash_embed_${target})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/embed.hpp.in ${dir}/embedded/${symbol}.hpp @ONLY)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/embed.cpp.in ${dir}/${symbol}.cpp @ONLY)
  # The compiler does not report an .incbin in its dependency file.
  set_source_files_properties(${dir}/${symbol}.cpp PROPERTIES OBJECT_DEPENDS "${file}")
  target_sources(${target} PRIVATE ${dir}/${symbol}.cpp)
  target_include_directories(${target} PRIVATE ${dir})
endfunction()

# The plotting library of the report: MXFLASH_PLOTLY_JS, by default that of the Python which builds the package, or the
# one that scripts/setup.sh installs in .venv.
set(plotly_python ${Python_EXECUTABLE})
if(NOT plotly_python)
  set(plotly_python ${PROJECT_SOURCE_DIR}/.venv/bin/python)
endif()
execute_process(
  COMMAND ${plotly_python} -c "import importlib.util as i; print(i.find_spec('plotly').submodule_search_locations[0])"
  OUTPUT_VARIABLE plotly_folder
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET
)
set(plotly_default ${plotly_folder}/package_data/plotly.min.js)
set(MXFLASH_PLOTLY_JS "${plotly_default}" CACHE FILEPATH "plotly.min.js to embed in the report")
if(NOT EXISTS "${MXFLASH_PLOTLY_JS}")
  message(
    FATAL_ERROR
    "MXFLASH_PLOTLY_JS: no file '${MXFLASH_PLOTLY_JS}'; run scripts/setup.sh, or name a plotly.min.js"
  )
endif()
